"""The reference backend in float64: small, plain, and the oracle of the tests."""
