"""Code that is copied into exported folders whose model no class of transformers can express."""
