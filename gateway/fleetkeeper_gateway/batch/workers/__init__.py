"""Workers: send lines, write their results, finalize batches."""
