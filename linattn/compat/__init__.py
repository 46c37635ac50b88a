"""The ops under the names, arguments and layouts of other libraries, and in their models. Nothing
here is imported by ``import linattn``, and nothing here imports the library it stands in for."""
