"""Sections of the configuration, one module per topic. `config.schema` combines them."""
