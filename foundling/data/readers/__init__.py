"""Files to rows: text, JSONL, CSV, Parquet, Arrow, and what their columns mean."""
