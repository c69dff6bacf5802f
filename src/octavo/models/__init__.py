"""The Transformers side: finding, loading and checking models, and the bridge from their layers to pages."""
