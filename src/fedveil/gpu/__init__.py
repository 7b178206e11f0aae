"""Fast paths on a GPU: captured graphs, fused kernels, and convolutions and norms of stacked models."""
