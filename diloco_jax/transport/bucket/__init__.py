"""The transport through a bucket: sessions whose messages are objects, for sites that may not open or reach a port."""
