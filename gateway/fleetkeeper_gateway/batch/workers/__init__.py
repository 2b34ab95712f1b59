"""Workers: send lines, keep their results, finalize batches."""
