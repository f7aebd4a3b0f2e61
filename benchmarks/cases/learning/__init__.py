"""Cases that train models and measure what they have learned."""
