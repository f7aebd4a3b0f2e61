"""Public corpora: from the archives that people have to memory-mapped datasets."""
