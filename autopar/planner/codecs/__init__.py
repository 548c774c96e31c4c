"""The choice of codecs, together with the layouts."""
