//! One file per nginx module, named as nginx's documentation names it.
