"""The mesh from degrees, and THE order in which a model is made parallel."""
