"""What paging saves: request traces through the real block manager and through contiguous allocators. No weights."""
