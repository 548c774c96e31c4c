"""Time, bytes and error of sending gradients by codecs."""
