"""Networks: normalized images in, `Outputs` out; heads and moving average beside them."""
