"""What a run says about itself: metrics in files, progress in the terminal."""
