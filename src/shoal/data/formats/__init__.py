"""Tables in files and databases: columns in blocks of rows, one file per format."""
