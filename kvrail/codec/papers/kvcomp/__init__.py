"""KVComp's error-bounded quantisation with canonical Huffman codes, in one lossy stage. README.md has the layout."""
