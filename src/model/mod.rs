//! RON to graph.
