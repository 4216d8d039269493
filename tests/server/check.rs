//! `gale check` on configurations of nginx.

use std::process::Stdio;

use serde_json::Value;

use crate::support::{self, Directory};

/// Output for a file in the directory, without the directory's name, and `true` if Gale would accept the file.
fn check(directory: &Directory, words: &[&str]) -> (String, String, bool) {
    let mut command = support::binary(false);
    command.arg("check").args(words.iter().map(|word| directory.replaced(word))).stdin(Stdio::null());
    let output = command.output().expect("the binary starts");
    let path = format!("{}/", directory.path().display());
    let text = |bytes| String::from_utf8(bytes).expect("text").replace(&path, "");
    (text(output.stdout), text(output.stderr), output.status.success())
}

fn json(text: &str) -> (Value, bool) {
    let directory = Directory::new();
    directory.write("nginx.conf", text);
    let (out, errors, succeeded) = check(&directory, &["--json", "%DIR%/nginx.conf"]);
    assert_eq!(errors, "");
    (serde_json::from_str(&out).expect("JSON"), succeeded)
}

fn verdict<'r>(report: &'r Value, name: &str) -> &'r Value {
    let directives = report["directives"].as_array().expect("a list");
    directives.iter().find(|directive| directive["name"] == name).expect("it occurs")
}

#[test]
fn each_directive_is_the_same_different_or_not_there() {
    let directory = Directory::new();
    directory.write("sites/a.conf", "server {\n    listen 80;\n    location /i { alias /data/; }\n}\n");
    directory.write(
        "nginx.conf",
        "events { worker_connections 100; }\nhttp {\n    types_hash_max_size 2048;\n    client_body_min_rate 1k;\n    \
         include sites/*.conf;\n    image_filter_buffer 1m;\n    lua_package_path '/x';\n    root /srv;\n}\n",
    );
    let (text, errors, succeeded) = check(&directory, &["%DIR%/nginx.conf"]);
    assert_eq!((errors.as_str(), succeeded), ("", false));
    let expected = "2 files, 12 directives

Not supported: Gale rejects the configuration (1)
  image_filter_buffer  nginx.conf:6

Not in a module documented by nginx (1)
  lua_package_path  nginx.conf:7

Different (";
    assert!(text.starts_with(expected), "{text}");
    for part in [
        "\n  listen              sites/a.conf:2\n    deferred unless deferred=off;",
        "\n    docs/configuration.md#listen\n",
        "\nNo effect, with a warning (1)\n  types_hash_max_size  nginx.conf:3\n",
        "\nGale's own (1)\n  client_body_min_rate  nginx.conf:4\n",
        "\nThe same (",
        "\nUnsafe (1)\n  sites/a.conf:3: \"/i../\" leads out of the directory \"/data/\" [alias_traversal, high]\n",
    ] {
        assert!(text.contains(part), "{part}\nin\n{text}");
    }
}

#[test]
fn commercial_and_third_party_directives_are_neither_unknown_nor_gale_s_own() {
    let text = "events {}
        http {
            keyval_zone zone=one:32k;
            js_import main.js;
            auth_jwt_claim_set $who sub;
            otel_exporter { endpoint 127.0.0.1:4317; interval 5s; }
            upstream group { zone group 64k; state /var/lib/group.state; server 127.0.0.1; ntlm; }
            prometheus_template one { }
            server {
                status_zone one;
                location /api { api write=on; }
                location / { proxy_pass http://group; health_check; keyval_misspelt; proxy_ssl_key_log /tmp/keys; }
            }
        }";
    let (report, succeeded) = json(text);
    assert!(!succeeded);
    for (name, whose) in [
        ("keyval_zone", "of nginx's commercial edition"),
        ("proxy_ssl_key_log", "of nginx's commercial edition"),
        ("auth_jwt_claim_set", "of nginx's commercial edition"),
        ("js_import", "of the module njs, which is not part of nginx's source"),
    ] {
        assert_eq!(
            (&verdict(&report, name)["verdict"], &verdict(&report, name)["text"]),
            (&"missing".into(), &whose.into())
        );
    }
    for name in ["status_zone", "api", "state", "ntlm", "otel_exporter", "health_check"] {
        let found = &verdict(&report, name)["verdict"];
        assert!(*found == "same" || *found == "different", "{name}: {found}");
    }
    assert_eq!(verdict(&report, "prometheus_template")["verdict"], "own");
    assert_eq!(verdict(&report, "keyval_misspelt")["verdict"], "unknown");
}

#[test]
fn programs_read_the_report_as_json() {
    let (report, succeeded) = json("events {}\nhttp { server { root /srv; return 301 https://$host$uri; } }\n");
    assert!(succeeded);
    assert_eq!((&report["files"], &report["statements"]), (&1.into(), &5.into()));
    assert_eq!(verdict(&report, "events")["verdict"], "same");
    assert_eq!(verdict(&report, "return")["verdict"], "different");
    assert_eq!(verdict(&report, "return")["places"][0]["line"], 2);
    let finding = &report["findings"][0];
    assert_eq!((&finding["check"], &finding["severity"]), (&"header_splitting".into(), &"high".into()));
}

#[test]
fn errors_of_a_configuration_are_told_beside_the_rest() {
    let (report, succeeded) = json("events {}\nroot /srv;\nhttp { server { listen; lissten 80; tcp_nodelay on; ");
    assert!(!succeeded);
    let messages: Vec<_> = report["problems"].as_array().expect("a list").iter().map(|one| &one["message"]).collect();
    assert_eq!(
        messages,
        [
            "\"root\" directive is not allowed here",
            "invalid number of arguments in \"listen\" directive",
            "unexpected end of file, expecting \"}\"",
        ]
    );
    assert_eq!(verdict(&report, "lissten")["verdict"], "unknown");
    assert!(verdict(&report, "lissten")["text"].as_str().expect("a hint").contains("\"listen\""));
    assert_eq!(verdict(&report, "tcp_nodelay")["verdict"], "same");
}

#[test]
fn a_file_that_cannot_be_read_is_told_as_the_server_tells_it() {
    let directory = Directory::new();
    let (out, errors, succeeded) = check(&directory, &["%DIR%/none.conf"]);
    assert_eq!((out.as_str(), succeeded), ("", false));
    assert_eq!(errors, "gale: [emerg] open() \"none.conf\" failed (2: No such file or directory)\n");
}

#[test]
fn a_large_configuration_has_a_short_report() {
    let servers = "server { listen 80; image_filter off; location /i { alias /data/; } }\n".repeat(5_000);
    let (report, succeeded) = json(&format!("events {{}}\nhttp {{\n{servers}}}\n"));
    assert!(!succeeded);
    let missing = verdict(&report, "image_filter");
    assert_eq!((&missing["count"], missing["places"].as_array().map(Vec::len)), (&5_000.into(), Some(20)));
    assert_eq!(report["findings"].as_array().map(Vec::len), Some(20));
}
