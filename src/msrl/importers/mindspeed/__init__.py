"""Files and launch scripts of MindSpeed, whose trainer decides which importer reads them."""
