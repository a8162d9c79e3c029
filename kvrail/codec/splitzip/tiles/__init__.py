"""What the forms of SplitZip share: tiles, planes, escapes, and how both devices make and read them."""
