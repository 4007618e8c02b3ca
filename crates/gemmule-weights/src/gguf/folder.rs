//! Translation into a folder that transformers saves.
