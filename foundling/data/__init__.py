"""Sources to shards, shards to rows, and the order in which every step reads them."""
