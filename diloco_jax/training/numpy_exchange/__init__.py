"""Exchange of fragments for islands whose parameters are not JAX arrays: everything is computed with NumPy."""
