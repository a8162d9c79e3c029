"""Closed KV pages in KVComp's form: quantised within a bound, Huffman coded, read by attention as they are."""
