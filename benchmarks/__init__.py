"""foundling beside other libraries, on one machine; see README.md."""
