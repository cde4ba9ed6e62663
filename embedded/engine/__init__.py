"""An HTTP engine that speaks SGLang's native API, for small models on one machine."""
