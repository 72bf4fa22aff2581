"""The result database: SQLAlchemy 2 models for writers and tools, a plain sqlite3 reader for the runtime."""
