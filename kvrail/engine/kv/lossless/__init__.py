"""Pages that stay losslessly compressed, in some twelve bits a value, while attention reads them."""
