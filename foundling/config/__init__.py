"""THE vocabulary: sections, presets, how a TARGET is resolved, the Manifest and the mixture."""
