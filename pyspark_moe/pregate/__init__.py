"""Research: guessing a layer's experts before its router runs, from traces with the routers' inputs. Nothing here serves."""
