"""One decoder-only transformer, by fields and never by name; plain, as if for one device."""
