"""Reports: pictures, tables and pages made from records, models and data."""
