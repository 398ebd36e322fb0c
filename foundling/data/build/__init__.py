"""Sources to a data set in three phases: encode, select, write shards."""
