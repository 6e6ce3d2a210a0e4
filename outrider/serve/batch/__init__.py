"""Files of many requests, in the format of OpenAI's Batch API: on one machine, or on many through Ray Data."""
