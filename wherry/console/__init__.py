"""What the `wherry` command prints: lines, tables, progress bars and results; names in them cannot forge anything."""
