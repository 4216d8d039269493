//! The manual page gale.conf(5), in mdoc.

use std::io::{self, Write};

use gale_check::Differences;
use gale_engine::module::Directive;

use super::modules;

const HEAD: &str = "\
.\\\" Made by `gale directives --man`; a test compares it with the program.
.Dd November 28, 2026
.Dt GALE.CONF 5
.Os
.Sh NAME
.Nm gale.conf
.Nd configuration of the web server gale
.Sh DESCRIPTION
The syntax is that of nginx: a directive consists of a name, its arguments and either
.Ql \\&;
or a block of directives in braces.
A word that contains spaces,
.Ql \\&; ,
.Ql {
or
.Ql }
must be quoted.
A number sign begins a comment.
.Bd -literal -offset indent
events {}
http {
    server {
        listen 80;
        root /srv/www;
    }
}
.Ed
.Pp
Sizes are in bytes, or have the unit k, m or g.
Times are in seconds, or have the units ms, s, m, h, d, w, M and y, as in 1h30m.
Paths are relative to the prefix, those of
.Ic include
to the directory of the main configuration file.
.Pp
.Ic gale -t
tests a configuration,
.Ic gale check
reports how Gale treats an nginx configuration.
.Sh DIRECTIVES
";

const TAIL: &str = "\
.Sh SEE ALSO
.Xr gale 8
.Pp
.Lk https://nginx.org/en/docs/ \"nginx's documentation\" ,
which describes the directives.
";

/// Writes the page.
pub fn write(out: &mut impl Write) -> io::Result<()> {
    let differences = Differences::read();
    out.write_all(HEAD.as_bytes())?;
    for (module, rows) in modules() {
        writeln!(out, ".Ss {}\n.Bl -tag -width Ds", module.name)?;
        for row in rows {
            item(out, row, &differences)?;
        }
        writeln!(out, ".El")?;
    }
    out.write_all(TAIL.as_bytes())
}

fn item(out: &mut impl Write, row: &Directive, differences: &Differences) -> io::Result<()> {
    writeln!(out, ".It Ic {}\n{}", row.name, line(row.about))?;
    writeln!(out, ".br\nTakes {}; in {}.", row.takes, row.contexts)?;
    if !row.default.is_empty() {
        writeln!(out, ".br\nDefault: {}", line(row.default))?;
    }
    for difference in differences.about(row.name, row.contexts) {
        writeln!(out, ".br\nDiffers from nginx: {}", line(&difference.text.replace('`', "")))?;
    }
    Ok(())
}

/// Escapes a text so that roff finds no requests in it.
fn line(text: &str) -> String {
    let text = text.replace('\\', "\\e");
    if text.starts_with(['.', '\'']) { format!("\\&{text}") } else { text }
}
