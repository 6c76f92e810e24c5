"""run -> one page: what a run did, as a file that opens in any browser, with no network."""
