//! nginx's configuration language. Knows no directive.
