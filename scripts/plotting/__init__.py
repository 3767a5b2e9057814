"""Charts that programs of this folder draw."""
