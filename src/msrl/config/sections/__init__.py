"""The sections of the configuration, a module for each part of the work; `config.schema` puts them together."""
