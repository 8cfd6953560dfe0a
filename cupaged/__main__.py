"""`python -m cupaged` is the command `cupaged`."""

import sys

from cupaged.cli import main

sys.exit(main())
