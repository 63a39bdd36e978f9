use super::run;

#[track_caller]
fn check(line: &str, status: u8, said: &str) {
    let (found, text) = run(line.split_whitespace().map(Into::into));
    assert_eq!((found, text.starts_with(said)), (status, true), "{line}: {found} {text}");
}

#[test]
fn command_lines_are_read_as_etcdutl_reads_them() {
    check("", 0, "Usage:\n  skegutl [command]");
    check("help", 0, "Usage:\n  skegutl [command]");
    check("--help", 0, "Usage:\n  skegutl [command]");
    check("snapshot", 0, "Usage:\n  skegutl snapshot [command]");
    check("snapshot nonsense", 0, "Usage:\n  skegutl snapshot [command]");
    check("snapshot restore -h", 0, "Usage:\n  skegutl snapshot restore <filename>");
    check("help snapshot status", 0, "Usage:\n  skegutl snapshot status <filename>");
    check("nonsense", 1, "Error: unknown command \"nonsense\" for \"skegutl\"\n");
    check("version", 0, "etcdutl version: 3.7.3\nAPI version: 3.7\n");
    check("ver", 0, "etcdutl version: 3.7.3\n");
    check("-w json version", 0, "etcdutl version");
    check("--version", 1, "Error: unknown flag: --version\nUsage:\n");
    check("version -x", 1, "Error: unknown shorthand flag: 'x' in -x\n");
    check("-w", 1, "Error: flag needs an argument: 'w' in -w\n");
    check("hashkv --rev", 1, "Error: flag needs an argument: --rev\n");
    check("hashkv", 1, "Error: accepts 1 arg(s), received 0\nUsage:\n  skegutl hashkv");
    check(
        "hashkv --rev x f",
        1,
        "Error: invalid argument \"x\" for \"--rev\" flag: strconv.ParseInt: parsing \"x\"",
    );
    check(
        "--timeout x version",
        1,
        "Error: invalid argument \"x\" for \"--timeout\" flag: time: invalid duration",
    );
    check("hashkv /none", 1, "Error: stat /none: no such file or directory\n");
    check("snapshot status", 128, "Error: snapshot status requires exactly one argument\n");
    check("snapshot status a b", 128, "Error: snapshot status requires exactly one argument\n");
    check("snapshot status /none", 1, "Error: stat /none: no such file or directory\n");
    check("snapshot status -w bad /dev/null", 4, "Error: unsupported output format\n");
    check("snapshot restore", 128, "Error: snapshot restore requires exactly one argument\n");
    check(
        "snapshot restore --bump-revision 5 x",
        128,
        "Error: --mark-compacted required if --revision-bump > 0\n",
    );
    check(
        "snapshot restore --mark-compacted x",
        128,
        "Error: --mark-compacted required if --revision-bump > 0\n",
    );
    check("snapshot restore --name a x", 1, "Error: couldn't find local --name \"a\" in --initial-cluster\n");
    check("snapshot export f", 1, "Error: required flag(s) \"output\", \"target-version\" not set\n");
    check(
        "snapshot export f --output o --target-version 3.4",
        128,
        "Error: target version \"3.4\" not supported",
    );
    check(
        "snapshot export /none --output o --target-version 3.5",
        1,
        "Error: stat /none: no such file or directory\n",
    );
    check("defrag", 1, "Error: required flag(s) \"data-dir\" not set\nUsage:\n");
    check("defrag --data-dir /none", 1, "Error: Failed to defragment etcd data[/none] (stat /none/");
    check("migrate", 1, "Error: required flag(s) \"data-dir\", \"target-version\" not set\n");
    check(
        "migrate --data-dir x --target-version 3",
        128,
        "Error: wrong target version format, expected \"X.Y\", got \"3\"",
    );
    check(
        "migrate --data-dir x --target-version 3.4",
        128,
        "Error: target version \"3.4\" not supported. Minimal \"3.5\"",
    );
}
