"""Data that lives elsewhere: repositories of the hub, other addresses, and recipes with a name.

    hf://datasets/OWNER/NAME[@config][:split][#revision]    also NAME/path/of/files-*.parquet
    https://..., s3://..., gs://...                         a file; where stores list, a pattern
    fineweb-edu, smoltalk, ...                              `foundling data build --list` lists them

Files are fetched into the hub's own cache, compared with the hub's checksums, and found there again
without network.
"""
