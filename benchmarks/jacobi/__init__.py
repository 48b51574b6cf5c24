"""benchmark=jacobi: a stencil with halo exchange, strong scaling."""
