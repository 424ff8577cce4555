"""The code of RaNNC's documents as scripts, one for each block, in our words: only the import and the device
differ from what a user had.

Run by test_rannc_documents.py on 2 and 4 ranks; each is a script for mpirun too. A fragment has around it
what it needs to run.
"""
