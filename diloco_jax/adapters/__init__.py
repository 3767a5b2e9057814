"""Islands in the training libraries of others: each room connects one library to `runtime/own_loop/`.

Users import the short paths, such as `diloco_jax.nnx`; those modules only forward names from here.
"""
