from trunkline.cli import main

raise SystemExit(main())
