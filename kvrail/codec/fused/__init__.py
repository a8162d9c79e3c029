"""What weights in fewer bytes share on a GPU: the product that unpacks them on the way, its builds and its launch."""
