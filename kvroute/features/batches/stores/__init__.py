"""Where the files of the Files API and the state of batches are kept."""
