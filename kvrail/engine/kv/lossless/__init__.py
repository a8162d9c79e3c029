"""Pages that are losslessly compressed where they lie: twelve bits a value and a little, read by attention as they are."""
