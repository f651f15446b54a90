"""What other trainers' options are called here, one file per trainer. Pure data."""
